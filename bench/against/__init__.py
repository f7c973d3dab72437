"""perco's peers, each as somebody would write it who wants it to win."""
