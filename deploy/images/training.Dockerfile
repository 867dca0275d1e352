# For the pods of jobs: your image with PyTorch, and the three lines of MindCluster's documents.
#
#   make wheels
#   docker build -f deploy/images/training.Dockerfile --build-arg BASE=your-image-with-pytorch -t my-training .
ARG BASE=python:3.11-slim
FROM $BASE

RUN python3 -c 'import torch' 2>/dev/null || pip3 install --no-cache-dir 'torch>=2.6' numpy

COPY dist/taskd-*.whl dist/mindio_ttp-*.whl /tmp/wheels/
ARG TASKD_WHL=/tmp/wheels/taskd-*.whl
ARG MINDIO_TTP_PKG=/tmp/wheels/mindio_ttp-*.whl
RUN pip3 install $TASKD_WHL
RUN pip3 install $MINDIO_TTP_PKG
RUN sed -i '/import os/i import taskd.python.adaptor.patch' $(pip3 show torch | grep Location | awk -F ' ' '{print $2}')/torch/distributed/run.py
RUN rm -r /tmp/wheels
