"""Sources of facts about a machine. Each source reads one thing and returns ``Findings``.

Sources of the live machine never raise: they return notes about what they could not find out, or
found to be contradictory. Readers of files that a user names raise InputFileError.
"""
