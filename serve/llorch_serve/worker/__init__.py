"""A loaded model that answers requests: text in, text out."""
