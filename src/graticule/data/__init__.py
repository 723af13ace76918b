"""Real images and text, local or shipped with a package, as reproducible batches.

Names are imported when they are first used: a recipe needs no PyTorch.
"""

from typing import TYPE_CHECKING

from graticule.lazy import lazy_names

if TYPE_CHECKING:
    from graticule.data.augmentation import Augmentation
    from graticule.data.byte_pairs import BytePairTokenizer
    from graticule.data.canvas import CanvasImages, Mode
    from graticule.data.dense import IGNORED, DenseImages, DenseInfo
    from graticule.data.dense_augmentation import DenseAugmentation
    from graticule.data.dense_module import DenseModule
    from graticule.data.documents import Document
    from graticule.data.images import ArrayImages, DatasetInfo, check_class_names, class_labels, same_classes
    from graticule.data.module import DataModule, build_mixup, list_datasets, load_dataset
    from graticule.data.registry import register_dataset, register_text
    from graticule.data.sampling import PADDING, BatchOrder, EpochSampler, EvaluationOrder
    from graticule.data.text import list_texts, load_text
    from graticule.data.text_module import TextInfo, TextModule, build_tokenizer, list_tokenizers
    from graticule.data.tokens import ByteTokenizer, Tokenizer, check_vocabulary
    from graticule.data.transformed import SeededImages
    from graticule.data.transforms import evaluation_transform, training_transform
    from graticule.data.windows import EvaluationWindows, TextWindows

__all__ = [
    "IGNORED",
    "PADDING",
    "ArrayImages",
    "Augmentation",
    "BatchOrder",
    "BytePairTokenizer",
    "ByteTokenizer",
    "CanvasImages",
    "DataModule",
    "DatasetInfo",
    "DenseAugmentation",
    "DenseImages",
    "DenseInfo",
    "DenseModule",
    "Document",
    "EpochSampler",
    "EvaluationOrder",
    "EvaluationWindows",
    "Mode",
    "SeededImages",
    "TextInfo",
    "TextModule",
    "TextWindows",
    "Tokenizer",
    "build_mixup",
    "build_tokenizer",
    "check_class_names",
    "check_vocabulary",
    "class_labels",
    "evaluation_transform",
    "list_datasets",
    "list_texts",
    "list_tokenizers",
    "load_dataset",
    "load_text",
    "register_dataset",
    "register_text",
    "same_classes",
    "training_transform",
]

_HOMES = {
    "Mode": "canvas",
    "DenseAugmentation": "dense_augmentation",
    "DenseImages": "dense",
    "DenseInfo": "dense",
    "DenseModule": "dense_module",
    "IGNORED": "dense",
    "PADDING": "sampling",
    "ArrayImages": "images",
    "Augmentation": "augmentation",
    "BatchOrder": "sampling",
    "BytePairTokenizer": "byte_pairs",
    "ByteTokenizer": "tokens",
    "CanvasImages": "canvas",
    "DataModule": "module",
    "DatasetInfo": "images",
    "Document": "documents",
    "EpochSampler": "sampling",
    "EvaluationOrder": "sampling",
    "EvaluationWindows": "windows",
    "SeededImages": "transformed",
    "TextInfo": "text_module",
    "TextModule": "text_module",
    "TextWindows": "windows",
    "Tokenizer": "tokens",
    "build_mixup": "module",
    "build_tokenizer": "text_module",
    "check_class_names": "images",
    "check_vocabulary": "tokens",
    "class_labels": "images",
    "evaluation_transform": "transforms",
    "list_datasets": "module",
    "list_texts": "text",
    "list_tokenizers": "text_module",
    "load_dataset": "module",
    "load_text": "text",
    "register_dataset": "registry",
    "register_text": "registry",
    "same_classes": "images",
    "training_transform": "transforms",
}
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
