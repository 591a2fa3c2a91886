"""The simulator's surroundings: request traces in, figures, tables and pictures out."""
