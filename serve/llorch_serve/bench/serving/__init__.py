"""Measuring a running worker under load: when requests are sent, what they ask, what came back, and what that
amounts to.
"""
