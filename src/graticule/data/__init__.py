"""Real images and text, on this machine or shipped with a package, as batches that can be repeated."""

from graticule.data.byte_pairs import BytePairTokenizer
from graticule.data.images import ArrayImages, DatasetInfo, check_class_names, same_classes
from graticule.data.module import DataModule, build_mixup, list_datasets, load_dataset
from graticule.data.sampling import PADDING, BatchOrder, EpochSampler, EvaluationOrder, SeededImages
from graticule.data.text import Document, list_texts, load_text
from graticule.data.text_module import TextInfo, TextModule, build_tokenizer, list_tokenizers
from graticule.data.tokens import ByteTokenizer, Tokenizer, check_vocabulary
from graticule.data.transforms import Augmentation, evaluation_transform, training_transform
from graticule.data.windows import EvaluationWindows, TextWindows

__all__ = [
    "PADDING",
    "ArrayImages",
    "Augmentation",
    "BatchOrder",
    "BytePairTokenizer",
    "ByteTokenizer",
    "DataModule",
    "DatasetInfo",
    "Document",
    "EpochSampler",
    "EvaluationOrder",
    "EvaluationWindows",
    "SeededImages",
    "TextInfo",
    "TextModule",
    "TextWindows",
    "Tokenizer",
    "build_mixup",
    "build_tokenizer",
    "check_class_names",
    "check_vocabulary",
    "evaluation_transform",
    "list_datasets",
    "list_texts",
    "list_tokenizers",
    "load_dataset",
    "load_text",
    "same_classes",
    "training_transform",
]
