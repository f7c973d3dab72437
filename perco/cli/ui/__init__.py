"""`perco ui`: a page that shows a store at work, for a browser.

    running    listens, and serves the page until it is asked to end
    app        the addresses of the page, and what answers there
    guard      which requests are answered
    shelf      the store, opened for reading; closed while an action needs it
    watching   samples: how far observers lag behind, how busy tablets are
    asking     what the page asks for: rows, failed changes, causes, differences
    acting     what the page does: pause, replay, drop
    static     the page itself; no build step; the libraries in `vendor` are unchanged

The page is served by a process of its own, which reads the files of a folder beside the store's owner, so it neither
holds up the owner's loop nor its writers.
"""
