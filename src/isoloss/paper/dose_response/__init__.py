"""The study dose-response: flatter and sharper models of one loss, and how transfer responds."""
