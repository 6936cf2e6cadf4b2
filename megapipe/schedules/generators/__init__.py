"""Built-in schedules, one file each: a pure function that orders compute actions, registered by `schedule`.

The registry imports every file of this folder whose name does not start with an underscore.
"""
