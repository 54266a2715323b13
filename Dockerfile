# The course in a container, for macOS, Windows and whoever wants it apart:
#
#   docker build -t jfa .
#   docker run --rm -it -p 127.0.0.1:8888:8888 -v jfa-course:/course jfa
#
# then open the address that JupyterLab prints. The volume jfa-course starts as the image's /course and keeps your answers
# and progress. Where this file was written no container could be built: it was not run.
FROM python:3.12-bookworm

WORKDIR /course
# First what set-up reads, so that a change in the course does not install everything again.
COPY requirements.txt pyproject.toml LICENSE README.md Makefile ./
COPY tools tools
COPY jfa/__init__.py jfa/__init__.py
RUN python3 tools/setup_env.py

COPY . .
EXPOSE 8888
CMD ["make", "lab", "LAB=--no-browser --ip=0.0.0.0 --port=8888"]
