from .cache.store import PromptCache as PromptCache
from .decoding.processors import make_logits_processors as make_logits_processors
from .decoding.sampling import make_sampler as make_sampler
from .drafters.pairing import check_pair as check_pair
from .generation.batch import BatchResponse as BatchResponse
from .generation.batch import batch_generate as batch_generate
from .generation.engine import Engine as Engine
from .generation.engine import QueueFull as QueueFull
from .generation.generate import generate as generate
from .generation.generate import stream_generate as stream_generate
from .generation.prompt_cache import can_trim_prompt_cache as can_trim_prompt_cache
from .generation.prompt_cache import load_prompt_cache as load_prompt_cache
from .generation.prompt_cache import make_prompt_cache as make_prompt_cache
from .generation.prompt_cache import save_prompt_cache as save_prompt_cache
from .generation.prompt_cache import trim_prompt_cache as trim_prompt_cache
from .generation.responses import GenerationResponse as GenerationResponse
from .loading.load import load as load
from .loading.load import load_drafter as load_drafter

__version__: str
