"""Fuzz targets: every parser of what strangers send or folders hold, with what may come out of it.

``python -m fuzz TARGET`` (through ``ci/fuzz``) runs one with coverage-guided mutation;
``tests/unit/test_fuzz_corpus.py`` runs all of them on the inputs that are kept in ``tests/data/fuzz``, among
them every input that once broke one.
"""
