"""Published and measured rows of training speed, and the few parameters of a machine that they are fitted by."""
