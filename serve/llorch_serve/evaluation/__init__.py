"""How good a served model is: perplexity of texts, tasks of lm-eval, divergence; gates and comparisons."""
