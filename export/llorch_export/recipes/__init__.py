"""Mixed recipes: ``file`` reads them, from TOML or by a name shipped here; ``resolve`` says which modules a
rule means.
"""
