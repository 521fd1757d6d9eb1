"""Puts this folder on the path of imports, so that tests below it share ``machine_files``."""
