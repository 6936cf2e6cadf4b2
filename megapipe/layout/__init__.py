"""The layout table, which says what each rank holds, and the prediction of each rank's memory and traffic."""
