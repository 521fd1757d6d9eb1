"""Where facts about a machine come from. Each source reads one thing and never raises: what it
could not find out, or found to be contradictory, it returns as notes."""
