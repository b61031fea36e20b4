# gplan beside the torch of the public PyTorch image; another one: --build-arg TORCH_IMAGE=pytorch/pytorch:TAG
#   docker build -t gplan . && docker run --rm --gpus all -v "$PWD":/work gplan profile model.py --device cuda
ARG TORCH_IMAGE=pytorch/pytorch:latest
FROM ${TORCH_IMAGE}
COPY . /opt/gplan
RUN pip install --no-cache-dir /opt/gplan
WORKDIR /work
ENTRYPOINT ["gplan"]
