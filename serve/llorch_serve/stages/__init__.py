"""A model that is cut into stages: each stage loaded where it runs, and lanes of sequences through all of
them.
"""
