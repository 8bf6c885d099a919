"""SGLang's platform for machines without an accelerator, in plain torch."""
