// The site's search is a worker, which browsers refuse a page that was opened from disk: there it runs in a frame.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.ready = new Promise(done => {
        frame.contentDocument.open()
        this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
        this.inside.start = done
        frame.contentDocument.write(`<script src="${url}" onload="start()"></script>`)
        frame.contentDocument.close()
      })
    }

    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
