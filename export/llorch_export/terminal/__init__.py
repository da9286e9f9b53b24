"""The exporter's commands. Their modules import what is heavy only when a command runs."""
