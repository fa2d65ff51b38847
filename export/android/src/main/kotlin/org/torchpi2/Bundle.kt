package org.torchpi2

import java.io.Closeable
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.channels.Channel
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.buffer
import kotlinx.coroutines.flow.channelFlow
import kotlinx.coroutines.flow.emitAll
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.isActive

/** A prompt or a talk is longer than the bundle has room for. */
class NoRoom(line: String) : IllegalStateException(line)

/**
 * A bundle that `torch_pi2.export` wrote, open. One per process, which gives one answer at a time: who asks for another
 * one waits. Opening it takes its time; do that on a thread of [Dispatchers.IO].
 *
 * What goes wrong is an [IllegalStateException] with one line: what was expected, what was found and what to do.
 */
class Bundle(
    folder: String,
    /** Bytes of all of it; -1: as it takes. */
    budget: Long = -1,
    /** 0: as many as ExecuTorch chooses. */
    threads: Int = 0,
    /** Compare the files with their checksums first; neurons are compared when they are read, whatever this is. */
    verify: Boolean = true,
) : Closeable {
    private var handle = open(folder.encodeToByteArray(), budget, threads, verify)

    @Volatile private var closed = false

    @Volatile private var running: Listener? = null

    /** Called by name from native code: consumer-rules.pro keeps it. */
    private inner class Listener(private val onText: (String) -> Unit, private val goesOn: () -> Boolean) {
        @Volatile var cancelled = false

        fun text(piece: ByteArray) = onText(piece.decodeToString())

        /** Asked before each token, and in the prompt before each piece that is read at once. */
        fun stops() = cancelled || closed || !goesOn()
    }

    /**
     * The text of the answer as it comes; a thread of [Dispatchers.IO] makes it. Who stops collecting it, ends it. At
     * the end [onReport] gets what `pi2_runner --json` writes, where the text is collected.
     */
    fun stream(request: Request, onReport: (String) -> Unit = {}): Flow<String> = flow {
        var report: String? = null
        val texts = channelFlow {
            try {
                report = answer(request, { trySend(it) }) { isActive }
            } catch (error: IllegalStateException) {
                ensureActive() // nobody hears what was wrong with an answer that nobody wants
                if (error !is CancellationException) throw error // else cancel() or close(): there is no more text
            }
        }
        emitAll(texts.buffer(Channel.UNLIMITED).flowOn(Dispatchers.IO)) // nobody who is slow to show it holds it up
        report?.let(onReport)
    }

    /** Answers the last of [messages]. What earlier answers have read of them is not read again. */
    fun chat(messages: List<Message>, how: Request = Request(), onReport: (String) -> Unit = {}): Flow<String> =
        stream(how.copy(messages = messages), onReport)

    /**
     * The report of the answer, once it has ended; until then [onText] gets its text as it comes, and ends it by
     * throwing. Throws [CancellationException] if [cancel] or [close] came before the first token.
     */
    fun generate(request: Request, onText: (String) -> Unit = {}): String = answer(request, onText) { true }

    /** Ends the answer that is on its way, before its next token. From any thread. */
    fun cancel() {
        running?.cancelled = true
    }

    /** Ends the answer that is on its way, and waits for that. */
    override fun close() {
        closed = true
        synchronized(this) { if (running == null) release() } // else this is within onText: answer does it
    }

    private fun answer(request: Request, onText: (String) -> Unit, goesOn: () -> Boolean): String {
        check(!closed) { "bundle: expected an open one, found a closed one. Open it again." }
        val listener = Listener(onText, goesOn)
        return synchronized(this) {
            check(running == null) { "bundle: expected one answer at a time, found a call in onText. Call it later." }
            running = listener
            try {
                val line = request.json().encodeToByteArray()
                val report = if (listener.stops()) null else generate(handle, line, listener) // it may be closed by now
                report?.decodeToString() ?: throw CancellationException("stopped before the first token")
            } finally {
                running = null
                if (closed) release()
            }
        }
    }

    private fun release() {
        val open = handle
        handle = 0
        if (open != 0L) close(open)
    }

    private companion object {
        init {
            System.loadLibrary("torch_pi2")
        }

        @JvmStatic external fun open(folder: ByteArray, budget: Long, threads: Int, verify: Boolean): Long

        @JvmStatic external fun generate(handle: Long, request: ByteArray, listener: Listener): ByteArray?

        @JvmStatic external fun close(handle: Long)

        /** Native code throws by this: strings of JNI itself are not of UTF-8. */
        @JvmStatic fun fail(line: ByteArray, noRoom: Boolean) {
            throw line.decodeToString().let { if (noRoom) NoRoom(it) else IllegalStateException(it) }
        }
    }
}
