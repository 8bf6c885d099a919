"""Show the particles of one answer, round by round, from its recorded trace."""
