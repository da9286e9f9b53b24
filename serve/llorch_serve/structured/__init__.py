"""Answers that keep a form: what a request may ask for, its grammar compiled within limits, and the mask of
each step.
"""
