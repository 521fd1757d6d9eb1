"""What a machine is made of, for tools (a report), for terminals (a tree, a matrix), as a picture."""
