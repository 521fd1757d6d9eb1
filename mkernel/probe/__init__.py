"""Views of a machine: for tools (a report), for terminals (a tree, a matrix), and as a picture."""
