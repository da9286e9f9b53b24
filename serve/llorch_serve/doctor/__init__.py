"""What this machine has, what it lacks, and whether the operators relied upon compute what they should."""
