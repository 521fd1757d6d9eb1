"""Ring attention by calls of a library on parts."""
