"""State of one conversation: keys and values, recurrent states, and the deferred commit over both."""
