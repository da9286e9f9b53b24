"""SmolLM2 quantised by the tools that people use: what ci/make-quantised runs in the environment of each."""
