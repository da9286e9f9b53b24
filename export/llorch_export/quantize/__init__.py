"""From a float matrix to packed blocks: ``layout`` has the format, ``nearest`` and ``search`` choose scales
and zero points.
"""
