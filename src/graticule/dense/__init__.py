"""Dense prediction: detection and semantic segmentation with any backbone, encoding and joining.

`create_detector` and `create_segmenter` build models from names. Your own necks, heads and decoders are classes that
`register_neck`, `register_head` and `register_decoder` register.
"""

from graticule.checkpoints.released_dense import load_published
from graticule.dense.adapter import Adapter
from graticule.dense.convolutional import FcnHead, SemanticFpn, UperHead
from graticule.dense.decoders import DECODERS, Decoder, register_decoder
from graticule.dense.deformable import DeformableAttention, deformable_sample
from graticule.dense.detector import HEADS, Detector, register_head
from graticule.dense.factory import create_detector, create_segmenter
from graticule.dense.features import NECKS, Features, Neck, Reader, register_neck
from graticule.dense.fpn import FeaturePyramid, SimplePyramid
from graticule.dense.hub import open_detector, open_segmenter
from graticule.dense.regions import FasterRcnn, MaskRcnn
from graticule.dense.retinanet import Fcos, RetinaNet
from graticule.dense.segmentation import SegmentationModel, segment_in_windows
from graticule.dense.segmenter import LinearDecoder, MaskTransformer
from graticule.dense.torchvision_parts import Anchors

__all__ = [
    "DECODERS",
    "HEADS",
    "NECKS",
    "Adapter",
    "Anchors",
    "Decoder",
    "DeformableAttention",
    "Detector",
    "FasterRcnn",
    "FcnHead",
    "Fcos",
    "FeaturePyramid",
    "Features",
    "LinearDecoder",
    "MaskRcnn",
    "MaskTransformer",
    "Neck",
    "Reader",
    "RetinaNet",
    "SegmentationModel",
    "SemanticFpn",
    "SimplePyramid",
    "UperHead",
    "create_detector",
    "create_segmenter",
    "deformable_sample",
    "load_published",
    "open_detector",
    "open_segmenter",
    "register_decoder",
    "register_head",
    "register_neck",
    "segment_in_windows",
]
