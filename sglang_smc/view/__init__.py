"""What particles did, told round by round: the record of one answer, and how to look at it."""
