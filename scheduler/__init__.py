"""Host policy: who gets the device in each step. Standard library and numpy only."""
