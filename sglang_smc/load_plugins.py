"""Load SGLang's plugins on import: for programs that make `ServerArgs` before SGLang loads them.

`sgl.Engine` and `sglang.launch_server` need no such import. Trainers that fill in `ServerArgs`
themselves, as verl and slime do, know SMC's flags after `import sglang_smc.load_plugins`.
"""

from sglang.srt.plugins import load_plugins

load_plugins()
