# Operator, ClusterD, noded and credentials, which are one program.
#
#   make wheels
#   docker build -f deploy/images/control-plane.Dockerfile -t evertrain-control-plane:0.1.0 .
ARG BASE=python:3.11-slim
FROM $BASE

COPY constraints.txt dist/evertrain-*.whl /tmp/evertrain/
RUN pip3 install --no-cache-dir -c /tmp/evertrain/constraints.txt "$(ls /tmp/evertrain/evertrain-*.whl)[cluster]" \
    && rm -r /tmp/evertrain

# The root file system is read-only where this runs.
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 9000:9000
ENTRYPOINT ["evertrain"]
