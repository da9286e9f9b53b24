"""Building the decoder graph: operators, their weights, and where each weight lies in the data file."""
