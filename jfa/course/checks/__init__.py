"""One module a chapter, ``NN_topic.py``, each with the list EXERCISES: loaded by :mod:`jfa.course.catalog`."""
