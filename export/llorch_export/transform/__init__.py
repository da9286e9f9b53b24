"""Exact changes of a checkpoint's weights before they are quantised, and what is measured on a text for
them.
"""
