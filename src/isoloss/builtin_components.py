"""The components that come with isoloss: by module and name, the attribute and, of most, a line about it."""

# a file is read by the last kind that takes it: other packages' come before the grammars, which take any file
LANGUAGES = {
    "isoloss.lab.languages.config": {
        "pcfg": ("PCFGConfig", "a random layered grammar"),
        "grammar": ("GrammarConfig", "a grammar given by its rules"),
        "brackets": ("BracketsConfig", "the paper's bracket language (section 5)"),
        "hidden-bracket": ("HiddenBracketConfig", "brackets with one hidden; the last token says whether it is < or >"),
        "dyck": ("DyckConfig", "nested brackets of several kinds, as a grammar"),
        "hmm": ("HMMConfig", "a random block-diagonal hidden Markov model"),
        "corpus": ("CorpusConfig", "real text"),
        "teacher": ("TeacherConfig", "a causal language model that writes sentences"),
        "framed": ("WithSpecialTokensConfig", "another language between [CLS] and [SEP]"),
    },
    "isoloss.lab.languages.serialization": {"file": ("FileConfig", "a stored language")},
}
ALGORITHMS = {
    "isoloss.lab.training.algorithms.config": {
        "gradient": ("GradientConfig", "the gradient of the loss alone"),
        "sam": ("SAMConfig", "sharpness-aware minimization"),
        "adversarial": ("AdversarialConfig", "spoil a downstream task at the same loss"),
        "fisher-penalty": ("FisherPenaltyConfig", "penalize the trace of the Fisher"),
        "feature-entropy": ("FeatureEntropyConfig", "raise or lower the effective rank of the features"),
    },
}
OPTIMIZERS = {
    "isoloss.lab.training.optimizers": {
        "adamw": ("adamw", "AdamW"),
        "sgd": ("sgd", "SGD, with momentum or without"),
        "muon": ("muon", "Muon for matrices of hidden layers, AdamW for all else"),
        "lawa": ("lawa", "AdamW; the average of its latest weights is saved and measured"),
    },
    "isoloss.lab.training.more_optimizers": {
        "soap": ("soap", "SOAP: Adam in the eigenbases of Shampoo's matrices"),
        "shampoo": ("shampoo", "Shampoo: gradients whitened by rows and by columns"),
        "lion": ("lion", "Lion: the sign of the momentum"),
        "schedule-free": ("schedule_free", "schedule-free AdamW: averages weights, has no decay"),
    },
}
MODELS = {
    "isoloss.lab.models.architectures": {
        "bert": ("BERT", "BERT: post-layer-norm blocks, GELU, a transform before the tied decoder"),
        "bert-pre-ln": ("PRE_LAYER_NORM_BERT", "BERT with pre-layer-norm blocks and a layer norm after the last one"),
        "lstm": ("LSTM", "LSTM layers, bidirectional by default; a decoder tied to the token embedding"),
        "opt": ("OPT", "OPT: pre-layer-norm blocks, ReLU, a tied decoder without bias"),
        "llama": ("LLAMA", "Llama: RMS norms, rotary positions, gated blocks, a tied decoder without bias"),
        "modernbert": ("MODERN_BERT", "ModernBERT: rotary positions, gated blocks, mostly local attention"),
        "bracket-attention": ("BRACKET_ATTENTION", "the paper's model of brackets (section 5): one head, ReLU neurons"),
    },
}
# of models of our own, by `model_type`: the module that makes them known to transformers
MODEL_TYPES = {
    "isoloss-bracket-attention": "isoloss.lab.models.bracket_attention",
    "isoloss-lstm": "isoloss.lab.models.lstm",
}
# functions or classes: the first line of a docstring is the line about it
MEASURES = {
    "isoloss.lab.evaluation.measures.loss": {
        "loss": "Loss",
        "generalization-gap": "GeneralizationGap",
    },
    "isoloss.lab.evaluation.measures.flatness": {
        "trace": "trace",
        "minimal-trace": "minimal_trace",
        "minimal-trace-by-kind": "minimal_trace_by_kind",
        "rescaling-control": "rescaling_control",
        "trace-in-SIZE-EMBEDDING_SCALE": "trace_in",
        "minimal-trace-in-SIZE": "minimal_trace_in",
        "empirical-fisher": "empirical_fisher",
        "diagonal-fisher": "diagonal_fisher",
        "hessian-trace": "hessian_trace",
        "weighted-trace": "weighted_trace",
        "fisher-rao": "fisher_rao",
        "relative-flatness": "relative_flatness",
        "largest-eigenvalue": "largest_eigenvalue",
        "spectral-density": "spectral_density",
        "sam-sharpness": "sam_sharpness",
        "adaptive-sharpness": "adaptive_sharpness",
        "noise-sharpness": "noise_sharpness",
        "int8-rise": "int8_rise",
        "int4-rise": "int4_rise",
        "int3-rise": "int3_rise",
        "int2-rise": "int2_rise",
        "int4-asymmetric-128-rise": "int4_asymmetric_128_rise",
        "int4-asymmetric-32-rise": "int4_asymmetric_32_rise",
        "int4-gptq-rise": "int4_gptq_rise",
        "nf4-rise": "nf4_rise",
        "noise-rise": "noise_rise",
        "barrier": "barrier",
        "frontier": "frontier",
        "llc": "llc",
        "directional-sharpness": "directional_sharpness",
        "critical-sharpness": "critical_sharpness",
        "gradient-noise-scale": "gradient_noise_scale",
        "gradient-agreement": "gradient_agreement",
        "squared-norm": "squared_norm",
    },
    "isoloss.lab.evaluation.measures.transfer": {
        "probe-TASK": "Probe",
        "lookup-TASK": "Lookup",
        "raw-lookup-TASK": "RawLookup",
        "standardized-lookup-TASK": "StandardizedLookup",
        "log-lookup-TASK": "LogLookup",
        "one-hot-TASK": "OneHot",
        "few-shot-TASK-NUMBER": "FewShot",
        "invariant-few-shot-TASK-NUMBER": "InvariantFewShot",
        "projected-TASK-WIDTH": "Projected",
        "finetune-TASK": "Finetune",
        "features": "Features",
        "effective-rank": "effective_rank",
        "unembedding-rank": "unembedding_rank",
    },
    "isoloss.lab.evaluation.measures.spans": {"span-LEVEL": "Span"},
    "isoloss.lab.evaluation.measures.brackets": {
        "bracket-parts": "bracket_parts",
        "bracket-probes": "bracket_probes",
        "bracket-tokens": "bracket_tokens",
    },
    "isoloss.suites.lm_eval": {"lm-eval-TASK": "lm_eval_task"},
}
TASKS = {
    "isoloss.transfer.text_sources": {
        "cola": ("COLA", "GLUE: whether a sentence is acceptable"),
        "mnli": ("MNLI", "GLUE: whether a premise entails a hypothesis, contradicts it, or neither"),
        "mrpc": ("MRPC", "GLUE: whether two sentences say the same"),
        "qnli": ("QNLI", "GLUE: whether a sentence answers a question"),
        "qqp": ("QQP", "GLUE: whether two questions ask the same"),
        "rte": ("RTE", "GLUE: whether one sentence entails another"),
        "sst2": ("SST2", "GLUE: whether a review is positive"),
        "wnli": ("WNLI", "GLUE: whether a sentence with a pronoun entails one with the pronoun replaced"),
        "docstring-kind": (
            "DOCSTRING_KIND",
            "whether a docstring of Python's library is of a class, function or method",
        ),
        "docstring-module": ("DOCSTRING_MODULE", "which of eight modules a docstring of Python's library is from"),
        "sentence-source": ("SENTENCE_SOURCE", "whether a sentence is of Python's reference or of a docstring"),
        "sentence-order": ("SENTENCE_ORDER", "whether two halves of a sentence about Python are in the right order"),
    },
    "isoloss.paper.dose_response_tasks": {
        "needed-LENGTH": ("needed", "what later tokens need of the first ones (languages that can be enumerated)"),
        "spare-LENGTH": ("spare", "what later tokens do not need of the first ones (languages that can be enumerated)"),
    },
}
EXECUTORS = {
    "isoloss.studies.run.local": {"local": ("run", "worker processes on this machine")},
    "isoloss.studies.run.ray": {"ray": ("run", "tasks on a Ray cluster")},
    "isoloss.studies.run.slurm": {"slurm": ("run", "Slurm jobs that share the study's folder")},
}
STUDIES = {
    "isoloss.paper.same_loss": {
        "same-loss": (
            "STUDY",
            "models of the same pre-training loss that differ in flatness: do they differ in transfer?",
        ),
    },
    "isoloss.paper.same_loss_pilot": {
        "same-loss-pilot": (
            "STUDY",
            "what the study same-loss is planned with: slopes of transfer on the loss, and variances",
        ),
    },
    "isoloss.paper.brackets": {
        "brackets": (
            "STUDY",
            "the paper's model of section 5, trained: does label noise flatten it, and what transfers better?",
        ),
    },
    "isoloss.paper.dose_response": {
        "dose-response": (
            "STUDY",
            "flatter and sharper models with the same loss, by a penalty of either sign: how does transfer respond?",
        ),
    },
    "isoloss.paper.optimizers": {
        "optimizers": (
            "STUDY",
            "causal models that eight optimizers bring to the same loss: which measure predicts which outcome?",
        ),
    },
    "isoloss.paper.reproduction.study": {"paper": ("STUDY", "every figure and table of the paper, at several scales")},
}
RESCALINGS = {
    "isoloss.flatness._rescaling.families": {
        "bert": ("bert", "BERT: post-layer-norm blocks"),
        "gemma": ("llama", "Gemma: as Llama, norms with gain 1 + weight"),
        "gemma2": ("llama", "Gemma 2: as Gemma, a norm after attention and after the feed-forward block too"),
        "gemma3_text": ("llama", "Gemma 3, text only: as Gemma 2, norms of queries and keys"),
        "gpt2": ("gpt2", "GPT-2: pre-layer-norm blocks, a fused map to queries, keys and values"),
        "gpt_neox": ("gpt_neox", "GPT-NeoX and Pythia: blocks side by side, rotary positions"),
        "isoloss-bracket-attention": (
            "bracket_attention",
            "isoloss's model of brackets: ReLU neurons, queries and keys",
        ),
        "isoloss-lstm": ("lstm", "isoloss's LSTM: no rescaling, or the embeddings alone where the decoder is not tied"),
        "llama": ("llama", "Llama: RMS norms, rotary positions, gated feed-forward blocks"),
        "mistral": ("llama", "Mistral: as Llama"),
        "modernbert": ("modernbert", "ModernBERT: pre-layer-norm blocks, gated feed-forward blocks"),
        "opt": ("opt", "OPT: ReLU, pre-layer-norm blocks or, as in OPT-350m, post-layer-norm ones"),
        "phi3": ("llama", "Phi-3: as Llama, with fused maps"),
        "qwen2": ("llama", "Qwen 2: as Llama, biases of queries, keys and values"),
        "qwen3": ("llama", "Qwen 3: as Llama, norms of queries and keys"),
        "roberta": ("bert", "RoBERTa: as BERT"),
        "roberta-prelayernorm": ("bert_pre_layer_norm", "RoBERTa-PreLayerNorm, which is isoloss's bert-pre-ln"),
    },
}
