"""How flatness is computed: per-sequence gradient norms, control variates, curvature products; internal."""
