# The names of transformers that this repository imports, for the type checker alone.
# The package's own __init__ imports every model: one name costs 3,600 files and 15 seconds.
# A name that is missing here is an error of the check: add it with the module that defines it.

from transformers.cache_utils import Cache as Cache
from transformers.cache_utils import DynamicCache as DynamicCache
from transformers.configuration_utils import PretrainedConfig as PretrainedConfig
from transformers.generation.configuration_utils import GenerationConfig as GenerationConfig
from transformers.generation.stopping_criteria import StoppingCriteria as StoppingCriteria
from transformers.generation.stopping_criteria import StoppingCriteriaList as StoppingCriteriaList
from transformers.modeling_utils import AttentionInterface as AttentionInterface
from transformers.modeling_utils import PreTrainedModel as PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig as AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM as AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    AutoModelForSequenceClassification as AutoModelForSequenceClassification,
)
from transformers.models.auto.modeling_auto import AutoModelForTokenClassification as AutoModelForTokenClassification
from transformers.models.auto.tokenization_auto import AutoTokenizer as AutoTokenizer
from transformers.models.bert.configuration_bert import BertConfig as BertConfig
from transformers.models.bert.modeling_bert import BertForSequenceClassification as BertForSequenceClassification
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config as Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2ForSequenceClassification as Gemma2ForSequenceClassification,
)
from transformers.models.gpt2.configuration_gpt2 import GPT2Config as GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel as GPT2LMHeadModel
from transformers.models.granite.configuration_granite import GraniteConfig as GraniteConfig
from transformers.models.granite.modeling_granite import GraniteForCausalLM as GraniteForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig as LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM as LlamaForCausalLM
from transformers.models.mistral.configuration_mistral import MistralConfig as MistralConfig
from transformers.models.mistral.modeling_mistral import MistralForCausalLM as MistralForCausalLM
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config as Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM as Qwen2ForCausalLM
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config as Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification as Qwen3ForSequenceClassification
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForTokenClassification as Qwen3ForTokenClassification
from transformers.tokenization_utils_base import PreTrainedTokenizerBase as PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast as PreTrainedTokenizerFast
