"""The measures of isoloss: frozen dataclasses whose fields are their settings. Nothing here needs torch."""
