"""Run SGLang on machines without an accelerator, in plain torch: a platform plugin."""
