"""What a matrix is stored in, and which runtime takes it."""
