package org.torchpi2

import java.io.Closeable

/** A bundle that `torch_pi2.export` wrote, open. One per process, and one thread at a time. */
class Bundle(
    folder: String,
    /** Bytes of all of it; -1: as it takes. */
    budget: Long = -1,
    /** 0: as many as ExecuTorch chooses. */
    threads: Int = 0,
    /** Compare the files with their checksums first; neurons are compared when they are read, whatever this is. */
    verify: Boolean = true,
) : Closeable {
    /** Called by name from native code: proguard-rules.pro keeps it. */
    private fun interface Listener {
        fun text(piece: ByteArray)
    }

    private var handle = open(folder.toByteArray(), budget, threads, verify)

    /**
     * Continues [prompt], or with [chat] answers it; [onText] gets the text as it comes.
     *
     * [maxNewTokens] 0: as many as there is room for. [temperature] 0 is greedy; [topP] is more than 0, at most 1.
     *
     * Returns the report of `pi2_runner --json`. Throws [IllegalStateException] with one line that says what is wrong.
     */
    @Synchronized
    fun generate(
        prompt: String,
        chat: Boolean = false,
        system: String = "",
        maxNewTokens: Int = 64,
        temperature: Double = 0.0,
        topP: Double = 1.0,
        seed: Long = 0,
        onText: (String) -> Unit = {},
    ): String {
        check(handle != 0L) { "bundle: expected an open one, found a closed one. Open it again." }
        val listener = Listener { onText(it.decodeToString()) }
        val report = generate(
            handle, prompt.toByteArray(), system.toByteArray(), chat, maxNewTokens, temperature, topP, seed, listener,
        )
        return report.decodeToString()
    }

    @Synchronized
    override fun close() {
        if (handle != 0L) close(handle)
        handle = 0
    }

    private companion object {
        init {
            System.loadLibrary("torch_pi2")
        }

        @JvmStatic external fun open(folder: ByteArray, budget: Long, threads: Int, verify: Boolean): Long

        @JvmStatic external fun generate(
            handle: Long, prompt: ByteArray, system: ByteArray, chat: Boolean, maxNewTokens: Int, temperature: Double,
            topP: Double, seed: Long, listener: Any,
        ): ByteArray

        @JvmStatic external fun close(handle: Long)
    }
}
