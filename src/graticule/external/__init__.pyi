from .attention_map import AttentionMap as AttentionMap
from .attention_map import save_attention as save_attention
from .backbone_view import BackboneView as BackboneView
from .hub import open_attached as open_attached
from .open_view import view_of as view_of
from .timm_view import TimmView as TimmView
from .view import ModelView as ModelView
from .view import Unavailable as Unavailable
