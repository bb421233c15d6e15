"""The reproduction of the paper: every table, figure and claim is a target of `mooring paper`."""
