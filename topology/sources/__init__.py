"""Where facts about a machine come from. Each source reads one thing and returns ``Findings``.

Sources of the live machine never raise: what they could not find out, or found to be contradictory,
they return as notes. Readers of files that a user names raise InputFileError.
"""
