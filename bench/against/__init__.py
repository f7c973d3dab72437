"""perco's peers; the code for each is written to make that peer win."""
