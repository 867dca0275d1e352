"""The descriptors of our messages, apart from those of other software: `Message` and `Status` are everybody's names."""

from google.protobuf.descriptor_pool import DescriptorPool

pool = DescriptorPool()
