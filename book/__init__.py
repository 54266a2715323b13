"""The book: every chapter executed, the exercises, the API and the notes as static HTML that opens without a network.

    .venv/bin/python -m book             (`make book` sets up what this needs, then runs it)

From the checkout to the pages, file by file:

    links       which page a file of the checkout gets, and what a link to it becomes
    execute     runs the chapters, two at a time, and keeps their outputs until chapter or package change
    pages       writes the sources that Sphinx reads: chapters, exercises with folded hints, files, the API's list
    citations   gathers the "Sources" of all chapters on one page
    conf        Sphinx's settings
    verify      reads the finished HTML: links, anchors, nothing fetched from elsewhere
"""
