"""What a problem is, and when an answer to it is right."""
